"""A tokenizer with a chat template as Llama 3's, and small models with it."""

import torch
from tokenizers.processors import TemplateProcessing

from condense import CondenseForCausalLM
from condense.training.small_llama import small_llama, word_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}<|stop|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)


def chat_tokenizer(texts):
    """A token is a word. As Llama's own, it puts a first token before a text, and the template holds that token too."""
    tokenizer = word_tokenizer([*texts, "user assistant"])
    first = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=first)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|stop|>", "<|eot|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_chat_model(folder, texts, seed=1, segment_length=16):
    """A folded model that ends its turn every now and then."""
    tokenizer = chat_tokenizer(texts)
    model = small_llama(tokenizer, seed)
    with torch.no_grad():  # at the start of training a model repeats itself: larger weights tell prompts apart
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|eot|>")] *= 1.5
    model.save_pretrained(folder)
    CondenseForCausalLM.from_pretrained(folder, segment_length=segment_length).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def greedy(model, ids, ends, num_new):
    """The tokens up to the first of `ends`, reading the whole text again for every one."""
    written = []
    while len(written) < num_new:
        with torch.no_grad():
            token = int(model(torch.tensor([ids + written]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        written.append(token)
    return written
