"""A tiny Idefics3 of random weights, which sees images, adapters for all of its parts, and PEFT's answers.

Of vLLM's multimodal classes it is one whose tower and connector take adapters, and that needs no torchvision.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.models import edit_config

MAX_TOKENS = 10
PROMPT = " w1 w2 w3"
# Adapters, by what they are for, as PEFT's regular expressions.
TEXT = r".*text_model.*\.(q_proj|v_proj|o_proj)"
TOWER = r".*vision_model.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
CONNECTOR = r".*modality_projection\.proj"
TARGETS = {"text": TEXT, "tower": TOWER, "connector": CONNECTOR, "all": f"{TEXT}|{TOWER}|{CONNECTOR}"}

_IMAGE_PIXELS, _WORDS = 56, 512
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>"]
_SPECIAL += ["<end_of_utterance>"]
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@dataclass(frozen=True)
class Multimodal:
    """The model, adapters below one directory, what PEFT answers with each ("" is the base model), and the image."""

    base: Path
    adapters: Path
    answers: dict[str, list[int]]
    image_url: str


def build(directory: Path) -> Multimodal:
    """Make it all: an adapter of each of `TARGETS`, and `tower-2`, of other weights than `tower`."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    base, adapters = directory / "base", directory / "adapters"
    torch.manual_seed(0)
    shared = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024}
    config = Idefics3Config(
        text_config={**shared, **text, "vocab_size": _WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={**shared, "image_size": _IMAGE_PIXELS, "patch_size": 14},
        image_token_id=_SPECIAL.index("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        vocab_size=_WORDS,
    )
    model = Idefics3ForConditionalGeneration(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(base)
    inputs, image_url = _inputs(base)
    answers = {"": _generate(model, inputs)}
    for name, targets, seed in [(name, targets, 1) for name, targets in TARGETS.items()] + [("tower-2", TOWER, 2)]:
        answers[name] = _adapt(model, adapters / name, targets, seed, inputs, base)
    return Multimodal(base, adapters, answers, image_url)


def _inputs(base: Path) -> tuple[Any, str]:
    """What the model is asked, which its processor makes; the image as a URL."""
    import numpy as np
    from PIL import Image
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = [*_SPECIAL, *(f"w{number}" for number in range(_WORDS - len(_SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL])
    size = {"longest_edge": _IMAGE_PIXELS}
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ),
        image_seq_len=4,
        chat_template=_TEMPLATE,
    )
    processor.save_pretrained(base)
    pixels = np.random.default_rng(0).integers(0, 255, (_IMAGE_PIXELS, _IMAGE_PIXELS, 3), dtype=np.uint8)
    image, file = Image.fromarray(pixels), io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return processor(text=f"<image>{PROMPT}", images=[image], return_tensors="pt"), url


def _adapt(model: Any, directory: Path, targets: str, seed: int, inputs: Any, base: Path) -> list[int]:
    import torch
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    answer = _generate(adapted, inputs)
    adapted.save_pretrained(str(directory))
    edit_config(directory, base_model_name_or_path=str(base))
    adapted.unload()
    return answer


def _generate(model: Any, inputs: Any) -> list[int]:
    ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False)
    return [int(token) for token in ids[0, inputs["input_ids"].shape[1] :]]
