"""A language model of which only adapters travel: LoRA by peft on a frozen model of transformers."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from fedpareto import DataSource, Pool, Task

WORDS, LENGTH, MARK = 50, 12, 7


class Classifier(nn.Module):
    """Token ids (n, LENGTH) to logits (n, 2)."""

    def __init__(self) -> None:
        super().__init__()
        # Tiny and random, so that nothing is downloaded. In earnest, every member has the same files in a directory:
        # BertForSequenceClassification.from_pretrained(DIR, local_files_only=True).
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
        adapters = LoraConfig(
            task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"], modules_to_save=["classifier"]
        )
        self.adapted = get_peft_model(BertForSequenceClassification(config), adapters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.adapted(input_ids=tokens).logits
        return logits


class Notes(Task):
    """Does a note mention the mark? Made-up notes; a member's own come from `source.directory`."""

    def model(self) -> nn.Module:
        return Classifier()

    def pool(self, source: DataSource) -> Pool:
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(MARK + 1, WORDS, (800, LENGTH), generator=random)
        marked = torch.rand(len(tokens), generator=random) < 0.5
        places = torch.randint(0, LENGTH, (len(tokens), 4), generator=random)
        tokens[marked] = tokens[marked].scatter(1, places[marked], MARK)
        return Pool(tokens, marked.long())
