"""Models of Hugging Face that are small enough to make anew in each test, in directories as the hub has them."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "an island hands over what it has trained and the fleet merges it into one model for all".split()  # noqa: SIM905
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
ROWS = 64


def tokenizer_in(folder, *, extra=()):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join((*TEXT, *extra))], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def llama(folder, *, seed=0, **changes):
    torch.manual_seed(seed)
    usual = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    usual |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**usual | {"tie_word_embeddings": True} | changes)).save_pretrained(folder)
    return tokenizer_in(folder)


def bert(folder, **changes):
    torch.manual_seed(0)
    usual = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    BertForMaskedLM(BertConfig(**usual | {"num_attention_heads": 2} | changes)).save_pretrained(folder)
    return tokenizer_in(folder)


def rows_in(path, make):
    path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(ROWS)))
    return path


def texts(path):
    return rows_in(path, lambda i: {"text": " ".join(TEXT[i % 7 :] + TEXT[: i % 5])})


def pairs(path):
    return rows_in(path, lambda i: {"first": " ".join(TEXT[i % 12 :][:4]), "second": " ".join(TEXT[i % 12 :][:6])})


def classes(path):
    return rows_in(path, lambda i: {"text": " ".join(TEXT[i % 2 * 6 :][:5]), "label": i % 2})
