"""Two tiny models that vLLM serves on a CPU, with weights that make its answers depend on every photograph.

- ``llava``: LLaVA, one tensor per image (batched fields);
- ``qwen2vl``: Qwen2-VL, the patches of all images behind one another (flat fields) and a grid per image that stays on the CPU.

Dummy weights would give the same answer whatever the picture.  These are seeded noise, wide enough that eight greedy tokens and
their log probabilities tell images and their order apart: the *fingerprint* of a request.

Run by itself (``python tests/engine/models.py DIRECTORY``) it writes both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 1024
# The first ids have a meaning; the same in both models, whether they use it or not.
SPECIAL = ("<unk>", "<s>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END = 2
IMAGE, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(3, 8)
WORDS = ("a", "photograph", "of", "and", "what", "is", "this", "user", "assistant", "describe", "the", "picture", "?", ".", ":")

# How each model's prompt names one image, and which token of the expanded prompt takes an embedding.
IMAGE_TEXT = {"llava": "<image>", "qwen2vl": "<|vision_start|><|image_pad|><|vision_end|>"}
EMBED_TOKEN = {"llava": IMAGE, "qwen2vl": IMAGE_PAD}
CHAT_TEMPLATE = (
    "{%% for message in messages %%}{{ message.role }} : "
    "{%% if message.content is string %%}{{ message.content }}{%% else %%}{%% for part in message.content %%}"
    "{%% if part.type == 'text' %%}{{ part.text }} {%% else %%}%s {%% endif %%}"
    "{%% endfor %%}{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%} assistant :{%% endif %%}"
)


def vocabulary() -> dict[str, int]:
    known = [*SPECIAL, *WORDS]
    return {word: number for number, word in enumerate([*known, *(f"w{n}" for n in range(len(known), VOCABULARY))])}


def write_tokenizer(directory: Path, model: str) -> None:
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece(prefix="##", cleanup=False)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=CHAT_TEMPLATE % IMAGE_TEXT[model],
    )
    wrapped.save_pretrained(directory)


def build(kind: Any, config: Any, seed: int = 0) -> Any:
    """The model with noise in every matrix, wide enough to carry an image through to the answer."""
    import torch

    config.dtype = "bfloat16"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)  # the vectors are filled by transformers
        model = kind(config)
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5))
    return model


def write_weights(model: Any, directory: Path, rename: Callable[[str], str] = str) -> None:
    """The weights under the names that published checkpoints have, which are not those of today's modules."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = {rename(name): tensor.bfloat16().contiguous() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_llava(directory: Path) -> Path:
    import transformers

    text = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "image_size": 112,
        "patch_size": 14,
        "projection_dim": 64,
    }
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        architectures=["LlavaForConditionalGeneration"],
        tie_word_embeddings=False,
    )
    model = build(transformers.LlavaForConditionalGeneration, config)
    tower = "vision_tower."
    write_weights(
        model,
        directory,
        lambda name: name.replace(tower, f"{tower}vision_model.") if f"{tower}vision_model." not in name else name,
    )
    size = {"height": 112, "width": 112}
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size=size)
    processor.save_pretrained(directory)
    write_tokenizer(directory, "llava")
    write_json(
        directory / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    )
    return directory


def write_qwen2vl(directory: Path) -> Path:
    import transformers

    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    text = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_parameters": rope,
        "rope_scaling": rope,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        architectures=["Qwen2VLForConditionalGeneration"],
        tie_word_embeddings=False,
    )
    model = build(transformers.Qwen2VLForConditionalGeneration, config)
    write_weights(model, directory)
    processor = transformers.Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=401408)
    processor.save_pretrained(directory)
    write_tokenizer(directory, "qwen2vl")
    return directory


WRITERS: dict[str, Callable[[Path], Path]] = {"llava": write_llava, "qwen2vl": write_qwen2vl}


def write_model(name: str, directory: Path) -> Path:
    """Make the directory of one model; the same bytes each time."""
    directory.mkdir(parents=True, exist_ok=True)
    return WRITERS[name](directory)


if __name__ == "__main__":
    for name in WRITERS:
        print(write_model(name, Path(sys.argv[1]) / name))
