"""HfProcessor over the processors of several families; they need torchvision, which only this environment has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf
from PIL import Image

from fastmm.processors import HfProcessor, Work, process_work

WORDS = ("<unk>", "<s>", "</s>", "what", "is", "this", "?")
PHOTOGRAPHS = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (200 + 60 * i, 300, 3), np.uint8)) for i in range(2)]
SOUNDS = [np.sin(np.arange(16_000 * (i + 1)) / 50).astype(np.float32) for i in range(2)]
CLIPS = [np.random.default_rng(i).integers(0, 256, (4 + 2 * i, 56, 84, 3), np.uint8) for i in range(2)]


def tokenizer(*special: str, **named: str) -> Any:
    words = dict.fromkeys((*WORDS, *special))
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        pad_token="<unk>",
        additional_special_tokens=list(special),
        model_input_names=["input_ids", "attention_mask"],
        **({"extra_special_tokens": named} if named else {}),
    )


def pixtral() -> Any:
    size = {"longest_edge": 256}
    images = hf.PixtralImageProcessor(size=size, patch_size={"height": 16, "width": 16})
    return hf.PixtralProcessor(images, tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"), patch_size=16)


def qwen2_5_vl() -> Any:
    words = tokenizer("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return hf.Qwen2_5_VLProcessor(hf.Qwen2VLImageProcessor(), words, hf.Qwen2VLVideoProcessor())


def gemma3() -> Any:
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return hf.Gemma3Processor(hf.Gemma3ImageProcessor(), tokenizer(*names.values(), **names), image_seq_length=8)


def internvl() -> Any:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    images = hf.GotOcr2ImageProcessor(size={"height": 64, "width": 64}, crop_to_patches=True, max_patches=4)
    return hf.InternVLProcessor(images, tokenizer(*names.values(), **names), hf.InternVLVideoProcessor(), image_seq_length=4)


def idefics3() -> Any:
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *cells)
    return hf.Idefics3Processor(hf.Idefics3ImageProcessor(size={"longest_edge": 728}), words, image_seq_len=4)


def llava_onevision() -> Any:
    images, videos = hf.LlavaOnevisionImageProcessor(), hf.LlavaOnevisionVideoProcessor()
    words = tokenizer("<image>", "<video>")
    return hf.LlavaOnevisionProcessor(images, words, videos, num_image_tokens=729, vision_feature_select_strategy="full")


def qwen2_audio() -> Any:
    words = tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    return hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(feature_size=128), words)


# Its maker, what a prompt calls an item, what takes its embeddings, the item, what cannot be inferred.
FAMILIES: dict[str, tuple[Any, str, str, str, dict[str, Any]]] = {
    "pixtral": (pixtral, "[IMG]", "[IMG]", "images", {}),
    "qwen2.5-vl": (qwen2_5_vl, "<|image_pad|>", "<|image_pad|>", "images", {}),
    "qwen2.5-vl video": (qwen2_5_vl, "<|video_pad|>", "<|video_pad|>", "videos", {}),
    "gemma3": (gemma3, "<start_of_image>", "<image_soft_token>", "images", {}),
    "internvl": (internvl, "<IMG_CONTEXT>", "<IMG_CONTEXT>", "images", {"fields": {"pixel_values": "flat"}}),
    "idefics3": (idefics3, "<image>", "<image>", "images", {}),
    "llava-onevision": (llava_onevision, "<image>", "<image>", "images", {}),
    "qwen2-audio": (qwen2_audio, "<|AUDIO|>", "<|AUDIO|>", "audios", {}),
}
MEDIA: dict[str, Any] = {"images": PHOTOGRAPHS, "videos": CLIPS, "audios": SOUNDS}


@pytest.mark.parametrize("family", FAMILIES)
def test_its_prompt_expands_as_the_processor_expands_it_and_embeddings_go_to_its_tokens(family):
    make, token, embed, where, options = FAMILIES[family]
    processor, media = make(), MEDIA[where]
    text = f"what {token} is {token} ?"
    made = process_work(HfProcessor(processor, **options), Work(request_id="r", text=text, **{where: media}))
    nested = family in ("gemma3", "idefics3")
    arguments: dict[str, Any] = {"audio" if where == "audios" else where: [media] if nested else media}
    if where == "audios":
        arguments["sampling_rate"] = 16_000
    theirs = processor(text=[text], return_tensors="pt", **arguments)["input_ids"][0].tolist()
    assert made.prompt_token_ids == theirs
    soft = processor.tokenizer.convert_tokens_to_ids(embed)
    taken = [at for item in made.items for first, last in item.spans for at in range(first, last + 1)]
    assert taken == [at for at, one in enumerate(theirs) if one == soft]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_items_features_are_its_own(family):
    make, token, _, where, options = FAMILIES[family]
    processor, media = HfProcessor(make(), **options), MEDIA[where]
    both = process_work(processor, Work(request_id="r", text=f"{token} {token}", **{where: media}))
    for item, one in zip(both.items, media, strict=True):
        (alone,) = process_work(processor, Work(request_id="s", text=token, **{where: [one]})).items
        assert item.hash == alone.hash
        assert item.features.keys() == alone.features.keys()
        assert all(torch.equal(item.features[key], alone.features[key]) for key in alone.features)
