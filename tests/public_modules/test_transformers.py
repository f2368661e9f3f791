"""transformers and peft: language models made from small configurations, and adapters around them."""

# pip install: transformers peft

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs, thin

transformers, peft = needs("transformers"), needs("peft")
BERT = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
GPT2 = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12, "use_cache": False}
LLAMA = {"num_key_value_heads": 1, "max_position_embeddings": 12, "use_cache": False}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "problem_type": "single_label_classification"}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Sentences(Dataset):
    """Dictionaries of tokens, as from a tokenizer and a collator."""

    def __init__(self, n: int, seed: int) -> None:
        self.tokens = torch.randint(0, 20, (n, 6), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens[0] % 2}


def clients() -> list[Sentences]:
    return [Sentences(n, seed) for seed, n in enumerate(SIZES)]


def classify(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return network(**batch).loss


def model_language(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return network(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def bert(**config: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, **config))


def adapted(method: Any, **options: Any) -> Any:
    config = method(task_type="SEQ_CLS", target_modules=["query", "value"], **options)
    return thin(peft.get_peft_model(bert(**PLAIN), config), classify)


def gpt2() -> Any:
    return thin(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **STILL)), model_language)


def llama() -> Any:
    return thin(transformers.LlamaForCausalLM(transformers.LlamaConfig(**BERT, **LLAMA)), model_language)


LOGGED = {"logged": ("train_loss",), "val": lambda: Sentences(4, 9)}
CASES = [
    PublicCase(
        "BertForSequenceClassification", lambda: thin(bert(**PLAIN), classify), clients, "vectorized", AGREED, **LOGGED
    ),
    PublicCase(
        "Bert with dropout",
        lambda: thin(bert(), classify),  # its first step sets config.problem_type
        clients,
        "vectorized",
        AGREED,
        draws=True,
        **LOGGED,
    ),
    PublicCase("Bert with LoRA", lambda: adapted(peft.LoraConfig, r=2), clients, "vectorized", AGREED, **LOGGED),
    PublicCase(
        "Bert with IA3",
        lambda: adapted(peft.IA3Config, feedforward_modules=[]),
        clients,
        "vectorized",
        AGREED,
        **LOGGED,
    ),
    PublicCase("GPT2LMHeadModel", gpt2, clients, "vectorized", AGREED, **LOGGED),
    PublicCase("LlamaForCausalLM", llama, clients, "vectorized", AGREED, **LOGGED),
]


class TestPublished(Published):
    cases = CASES
