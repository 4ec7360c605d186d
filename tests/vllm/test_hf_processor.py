"""HfProcessor against the HuggingFace processors that it wraps: their features, their ids, one item at a time."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hf_batches import clips, photographs
from PIL import Image

import fastmm
from fastmm.errors import ProcessorError
from fastmm.processors import Field, HfProcessor, Layout, Media, Work, to_features
from fastmm.processors.testing import check_processor

SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "[IMG_BREAK]", "[IMG_END]", "<|image_pad|>", "<|audio|>"]
IMAGE, BREAK, END, PAD, AUDIO = range(3, 8)


def tokenizer() -> Any:
    words = [*SPECIAL, "what", "is", "this", "?", "and"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        pad_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        model_input_names=["input_ids", "attention_mask"],
    )


def llava() -> Any:
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(),
        tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava_next() -> Any:
    return transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessorPil(),
        tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


class Rows:
    """As Pixtral's processor: a break after each row of patches, an end after the last. That one needs torchvision."""

    image_token = "<image>"
    chat_template = None

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __call__(self, text: list[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> dict[str, Any]:
        sizes = [(2 + image.size[0] % 3, 3) for image in images or ()]
        parts = text[0].split("<image>")
        whole = parts[0]
        for (rows, columns), part in zip(sizes, parts[1:], strict=True):
            whole += " [IMG_BREAK] ".join(["<image>" * columns] * rows) + "[IMG_END]" + part
        made = self.tokenizer([whole], return_tensors=return_tensors, **options)
        if images:
            made["pixel_values"] = torch.stack([torch.tensor(np.asarray(image.resize((8, 8)))) / 255 for image in images])
            made["image_sizes"] = torch.tensor(sizes)
        return dict(made)


def qwen(**options: Any) -> HfProcessor:
    hf = transformers.Qwen2VLImageProcessorPil(max_pixels=401_408)
    return HfProcessor(hf, tokenizer=tokenizer(), placeholders={"image": "<|image_pad|>"}, **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def files(n: int) -> list[bytes]:
    return [encoded(image) for image in photographs()[:n]]


# --- against the whole processor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llava, llava_next, Rows])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_prompt_expands_as_the_processor_itself_expands_it(make, n):
    hf = make()
    text = "what " + "<image>" * n + " is <unk> ?"
    theirs = hf(text=[text], images=photographs()[:n] or None, return_tensors="pt")["input_ids"][0].tolist()
    assert HfProcessor(hf).request(text, images=files(n)).prompt_token_ids == theirs


@pytest.mark.parametrize("make", [llava, llava_next, Rows])
def test_features_are_those_of_the_processor_for_each_item_alone(make):
    hf = make()
    request = HfProcessor(hf).request("<image> and <image>", images=files(2))
    for feature, image in zip(request.mm_features, photographs()):
        alone = hf(text=["<image>"], images=[image], return_tensors="pt")
        assert set(feature.data) == set(alone) - {"input_ids", "attention_mask"}
        for key, elem in feature.data.items():
            assert torch.equal(elem.data, alone[key][0]), key
            assert type(elem.field).__name__ == "MmBatchedField"


@pytest.mark.parametrize("make", [llava, llava_next, Rows])
def test_embeddings_go_to_the_image_tokens_and_to_no_others(make):
    request = HfProcessor(make()).request("what <image><image> is", images=files(2))
    ids = np.array(request.prompt_token_ids)
    taken = np.zeros(len(ids), bool)
    for feature in request.mm_features:
        place = feature.mm_position
        mask = np.ones(place.length, bool) if place.is_embed is None else np.frombuffer(place.is_embed.data, bool)
        taken[place.offset : place.offset + place.length] |= mask
    assert np.array_equal(taken, ids == IMAGE)


def test_break_tokens_between_rows_are_no_part_of_the_mask():
    (feature,) = HfProcessor(Rows()).request("<image>", images=files(1)).mm_features
    assert feature.mm_position.is_embed is not None
    assert 0 < np.frombuffer(feature.mm_position.is_embed.data, bool).sum() < feature.mm_position.length


class Marked(Rows):
    """As Gemma 3's processor: the prompt has a begin of an image, and other tokens take its embeddings."""

    image_token = "[IMG_BREAK]"

    def __init__(self) -> None:
        super().__init__()
        self.image_token_id = IMAGE

    def __call__(self, text: list[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> dict[str, Any]:
        whole = text[0].replace("[IMG_BREAK]", "? [IMG_BREAK]" + "<image>" * 4 + "[IMG_END] ?")
        made = self.tokenizer([whole], return_tensors=return_tensors, **options)
        return {**made, "pixel_values": torch.stack([torch.tensor(np.asarray(one.resize((8, 8)))) / 255 for one in images])}


def test_the_token_of_the_prompt_need_not_be_the_one_that_takes_embeddings():
    request = HfProcessor(Marked()).request("what [IMG_BREAK] is", images=files(1))
    (feature,) = request.mm_features
    place = feature.mm_position
    assert request.prompt_token_ids[place.offset : place.offset + place.length] == [IMAGE] * 4
    assert request.prompt_token_ids.count(IMAGE) == 4
    (feature,) = HfProcessor(Marked(), embeds={"image": "[IMG_END]"}).request("[IMG_BREAK]", images=files(1)).mm_features
    assert feature.mm_position.length == 1
    with pytest.raises(ProcessorError, match="got none of them"):
        HfProcessor(Marked(), embeds={"image": AUDIO}).request("[IMG_BREAK]", images=files(1))
    silent = Marked()
    del silent.image_token_id
    with pytest.raises(ProcessorError, match="not certain: say so with embeds="):
        HfProcessor(silent).request("[IMG_BREAK]", images=files(1))


def test_an_items_features_do_not_depend_on_its_neighbours():
    processor = HfProcessor(llava_next())
    wide = encoded(photographs()[0].resize((900, 200)))
    alone = processor.request("<image>", images=[wide]).mm_features[0]
    beside = processor.request("<image> <image>", images=[wide, files(1)[0]]).mm_features[0]
    assert alone.mm_hash == beside.mm_hash
    assert alone.data == beside.data


def test_ids_are_taken_in_the_place_of_text():
    processor = HfProcessor(llava())
    text = "what <image> is <image>"
    by_ids = processor.request(prompt_token_ids=processor.tokenizer.encode(text), images=files(2))
    by_text = processor.request(text, images=files(2))
    assert by_ids.prompt_token_ids == by_text.prompt_token_ids
    assert by_ids.mm_features == by_text.mm_features


def test_from_pretrained_loads_what_was_saved(tmp_path):
    llava().save_pretrained(tmp_path)
    request = HfProcessor.from_pretrained(str(tmp_path)).request("<image>", images=files(1))
    assert request.mm_features == HfProcessor(llava()).request("<image>", images=files(1)).mm_features


# --- image processors and feature extractors alone --------------------------------------------------------------------


def test_patches_beside_a_grid_are_flat_and_the_grid_stays_on_the_cpu():
    request = qwen().request("what <|image_pad|> and <|image_pad|>", images=files(2))
    batch = transformers.Qwen2VLImageProcessorPil(max_pixels=401_408)(photographs()[:2], return_tensors="pt")
    grid = batch["image_grid_thw"]
    theirs = fastmm.build_features(
        tensors=dict(batch),
        flat={"pixel_values": grid.prod(-1)},
        batched={"image_grid_thw"},
        keep_on_cpu={"image_grid_thw"},
        placeholders=[(one.mm_position.offset, int(g.prod()) // 4) for one, g in zip(request.mm_features, grid)],
        hashes=[one.mm_hash for one in request.mm_features],
        prompt_token_ids=request.prompt_token_ids,
    )
    assert request.mm_features == theirs
    assert request.prompt_token_ids.count(PAD) == int(grid.prod(-1).sum()) // 4


def test_raw_pixels_for_an_engine_that_normalises_stay_uint8_and_are_not_cast():
    request = qwen(raw_pixels=True).request("<|image_pad|>", images=files(1))
    pixels = request.mm_features[0].data["pixel_values"].data
    assert pixels.dtype == torch.uint8
    assert len(pixels.unique()) > 100
    hf = transformers.Qwen2VLImageProcessorPil(max_pixels=401_408)
    theirs = hf(photographs()[:1], return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"]
    assert torch.equal(pixels.float(), theirs.float())
    again = fastmm.decode_request(fastmm.encode_request(request, dtype="bfloat16"))
    assert torch.equal(again.mm_features[0].data["pixel_values"].data, pixels)


def test_sound_goes_through_a_feature_extractor_with_a_count_of_tokens():
    hf = transformers.WhisperFeatureExtractor(feature_size=80)
    processor = HfProcessor(
        hf,
        tokenizer=tokenizer(),
        placeholders={"audio": AUDIO},
        tokens={"audio": lambda features: features["input_features"].shape[-1] // 2},
        options={"return_attention_mask": True},
    )
    sounds = clips()[:2]
    request = processor.request("<|audio|> and <|audio|>", audios=[sounds[0], (sounds[1], 16_000)])
    theirs = hf(sounds, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
    for i, feature in enumerate(request.mm_features):
        assert feature.modality == "audio"
        assert torch.equal(feature.data["input_features"].data, theirs["input_features"][i])
        assert torch.equal(feature.data["attention_mask"].data, theirs["attention_mask"][i])
        assert feature.mm_position.length == 1500


def test_a_bare_processor_without_a_grid_wants_to_know_the_number_of_tokens():
    processor = HfProcessor(transformers.CLIPImageProcessorPil(), tokenizer=tokenizer(), placeholders={"image": IMAGE})
    with pytest.raises(ProcessorError, match="tokens="):
        processor.request("<image>", images=files(1))
    known = HfProcessor(
        transformers.CLIPImageProcessorPil(),
        tokenizer=tokenizer(),
        placeholders={"image": IMAGE},
        tokens={"image": lambda _: 5},
    )
    assert known.request("<image>", images=files(1)).prompt_token_ids == [IMAGE] * 5


class Tiles:
    """As processors of tiles do: more rows than items, and nothing that says so."""

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        return {"pixel_values": torch.zeros(4, 3, 8, 8), "scale": [2.5], "unused": torch.zeros(1)}


def test_what_is_not_certain_must_be_said():
    options: dict[str, Any] = {"tokenizer": tokenizer(), "placeholders": {"image": IMAGE}, "tokens": {"image": lambda _: 4}}
    with pytest.raises(ProcessorError, match=r"'pixel_values' is not certain: say so with fields=") as caught:
        HfProcessor(Tiles(), **options).request("<image>", images=files(1))
    assert caught.value.path == "images[0]"
    processor = HfProcessor(Tiles(), **options, fields={"pixel_values": "flat"}, drop=["unused"])
    (feature,) = processor.request("<image>", images=files(1)).mm_features
    assert list(feature.data) == ["pixel_values", "scale"]
    assert feature.data["pixel_values"].data.shape == (4, 3, 8, 8)
    assert feature.data["pixel_values"].field.slices == [slice(0, 4)]
    assert feature.data["scale"].data == 2.5
    shared = HfProcessor(Tiles(), **options, fields={"pixel_values": Field(Layout.SHARED, keep_on_cpu=True)})
    assert (
        type(shared.request("<image>", images=files(1)).mm_features[0].data["pixel_values"].field).__name__ == "MmSharedField"
    )
    wrong = HfProcessor(Tiles(), **options, fields={"pixel_values": "batched"})
    with pytest.raises(ProcessorError, match="one row for its item"):
        wrong.request("<image>", images=files(1))


# --- prompts that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "n"), [("no image", 1), ("<image><image>", 1), ("<image>", 2)])
def test_placeholders_and_items_are_as_many(text, n):
    with pytest.raises(ProcessorError, match=f"each of the {n} images"):
        HfProcessor(llava()).request(text, images=files(n))


def test_a_prompt_that_does_not_fit_costs_no_decoding():
    class Counting(HfProcessor):
        loads = 0

        def load(self, media: Media) -> Any:
            self.loads += 1
            return super().load(media)

    processor = Counting(llava())
    with pytest.raises(ProcessorError, match="expected a placeholder"):
        processor.request("<image>" * 3, images=files(2))
    assert processor.loads == 0


def test_a_modality_without_a_placeholder_is_refused():
    with pytest.raises(ProcessorError, match="takes no audios"):
        HfProcessor(llava()).request("<image>", audios=[np.zeros(10, np.float32)])
    with pytest.raises(ProcessorError, match="expected a token of the tokenizer for images"):
        HfProcessor(llava(), placeholders={"image": "<nothing>"}).request("<image>", images=files(1))


def test_no_prompt_and_no_tokenizer_are_errors():
    with pytest.raises(ProcessorError, match="neither text nor ids"):
        HfProcessor(llava()).request(images=files(1))
    bare = HfProcessor(transformers.CLIPImageProcessorPil(), placeholders={"image": IMAGE})
    with pytest.raises(ProcessorError, match="tokenizer"):
        bare.request("<image>", images=files(1))


def test_a_photograph_cut_short_is_an_error_of_its_request():
    data = files(1)[0]
    with pytest.raises(ProcessorError, match="failed: OSError"):
        HfProcessor(llava()).request("<image>", images=[data[: len(data) // 2]])


@pytest.mark.parametrize(
    "image", [np.zeros((20, 20), np.uint8), np.zeros((0, 5, 3), np.uint8), np.zeros(9), Image.new("RGB", (0, 0))]
)
def test_what_is_no_image_is_an_error_without_its_pixels(image):
    with pytest.raises(ProcessorError, match="expected an image"):
        HfProcessor(llava()).request("<image>", images=[image])


def test_a_failure_of_the_processor_names_the_item_and_keeps_its_message_to_the_cause():
    class Failing(Rows):
        def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
            raise ValueError(f"cannot use {options['images']}")

    with pytest.raises(ProcessorError, match=r"^images\[0\]: Failing failed on it \(ValueError\)$") as caught:
        HfProcessor(Failing()).request("<image>", images=files(1))
    assert "cannot use" in str(caught.value.__cause__)


def test_what_cannot_be_loaded_says_so(tmp_path):
    with pytest.raises(ProcessorError, match="cannot be loaded"):
        HfProcessor.from_pretrained(str(tmp_path / "nowhere"))


# --- loading and hashes -----------------------------------------------------------------------------------------------


def loaded(data: Any) -> Image.Image:
    return HfProcessor(llava()).load(Media("image", data, memoryview(data)))


def turned(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(image, "JPEG", exif=exif)


def see_through(mode: str) -> bytes:
    image = photographs()[0].resize((32, 32)).convert(mode)
    image.putalpha(Image.linear_gradient("L").resize((32, 32)))
    return encoded(image)


PHOTOGRAPH = photographs()[0].resize((32, 48))
FILES = {
    "PNG": encoded(PHOTOGRAPH),
    "JPEG": encoded(PHOTOGRAPH, "JPEG"),
    "GIF": encoded(PHOTOGRAPH, "GIF"),
    "WEBP": encoded(PHOTOGRAPH, "WEBP"),
    "turned by EXIF": turned(PHOTOGRAPH),
    "RGBA": see_through("RGBA"),
    "LA": see_through("LA"),
    "palette, one colour transparent": encoded(PHOTOGRAPH.convert("P"), transparency=3),
    "RGB, one colour transparent": encoded(PHOTOGRAPH, transparency=PHOTOGRAPH.getpixel((5, 5))),
    "grey": encoded(PHOTOGRAPH.convert("L")),
    "black and white": encoded(PHOTOGRAPH.convert("1")),
    "palette": encoded(PHOTOGRAPH.convert("P")),
    "16 bits": encoded(PHOTOGRAPH.convert("L").convert("I;16")),
    "CMYK": encoded(PHOTOGRAPH.convert("CMYK"), "TIFF"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_photograph_is_loaded_as_vllm_loads_it(name):
    from vllm.multimodal.media.image import ImageMediaIO

    ours, theirs = loaded(FILES[name]), ImageMediaIO().load_bytes(FILES[name]).media
    assert ours.mode == theirs.mode == "RGB"
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def test_the_files_show_what_they_are_for():
    assert loaded(FILES["turned by EXIF"]).size == (48, 32)
    white = np.array([255, 255, 255])
    assert (np.asarray(loaded(FILES["RGB, one colour transparent"])) == white).all(-1).any()
    assert np.asarray(loaded(FILES["RGBA"]))[0].min() > 240


def test_hashes_follow_content_options_and_processor():
    def digest(processor: HfProcessor, data: Any, text: str = "<image>", **options: Any) -> str:
        return processor.request(text, images=[data], **options).mm_features[0].mm_hash

    one, other = files(2)
    base = digest(HfProcessor(llava()), one)
    assert digest(HfProcessor(llava()), one, "what <image> is", request_id="another") == base
    different = {
        "content": digest(HfProcessor(llava()), other),
        "salt": digest(HfProcessor(llava(), salt="model-b"), one),
        "options": digest(HfProcessor(llava(), options={"do_center_crop": False, "size": {"height": 224, "width": 224}}), one),
        "processor": digest(HfProcessor(llava_next()), one),
    }
    assert len({base, *different.values()}) == 5
    small = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(image_mean=[0, 0, 0]),
        tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    assert digest(HfProcessor(small), one) not in {base, *different.values()}


def test_decoded_images_and_arrays_are_taken_and_hashed():
    processor = HfProcessor(llava())
    image = photographs()[0]
    made = [processor.request("<image>", images=[source]).mm_features[0] for source in (image, np.asarray(image), files(1)[0])]
    assert torch.equal(made[0].data["pixel_values"].data, made[1].data["pixel_values"].data)
    assert torch.equal(made[0].data["pixel_values"].data, made[2].data["pixel_values"].data)
    again = processor.request("<image>", images=[image.copy()]).mm_features[0]
    assert again.mm_hash == made[0].mm_hash


@pytest.mark.parametrize("make", [lambda: HfProcessor(llava()), lambda: HfProcessor(Rows()), qwen])
def test_the_conformance_kit_passes(make):
    processor = make()
    token = "<|image_pad|>" if type(processor.hf).__name__.startswith("Qwen") else "<image>"
    one, two = files(2)
    works = [
        Work(request_id="a", text=f"what {token}", images=[one]),
        Work(request_id="b", text=f"{token} and {token} ?", images=["http://host/a", two], prefetched=[two]),
        Work(request_id="c", text="what is this ?"),
        Work(request_id="d", prompt_token_ids=processor.tokenizer.encode(f"is {token}"), images=[photographs()[2]]),
    ]
    check_processor(processor, works, threads=4, rounds=2)


def test_a_subclass_may_have_a_schema_that_sets_options():
    import dataclasses

    @dataclasses.dataclass
    class Extensions:
        multimodal_max_pixels: int = 401_408

    class Sized(HfProcessor):
        schema = Extensions

        def options_for(self, work: Work) -> dict[str, Any]:
            return {**self.options, "max_pixels": work.extensions.multimodal_max_pixels}

    from fastmm.processors import process_work

    processor = Sized(transformers.Qwen2VLImageProcessorPil(), tokenizer=tokenizer(), placeholders={"image": PAD})
    small, large = (
        to_features(
            process_work(
                processor,
                Work(request_id="r", text="<|image_pad|>", images=files(1), extensions={"multimodal_max_pixels": pixels}),
            )
        )[0]
        for pixels in (28 * 28 * 16, 28 * 28 * 256)
    )
    assert small.mm_position.length < large.mm_position.length
    assert small.mm_hash != large.mm_hash
