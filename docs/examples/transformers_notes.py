"""A model of transformers, its data and its metrics, as they are, and the task that brings them into a federation."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from fedpareto import DataSource
from fedpareto.adapters.transformers import TransformersTask

# ---- what you have: a model, data sets, and what is computed of the answers

WORDS, LENGTH, MARK = 50, 12, 7


def make_model():
    # Tiny and random, so that nothing is downloaded. In earnest, every member has the same files in a directory:
    # BertForSequenceClassification.from_pretrained(DIR, local_files_only=True, dtype="float32").
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


class Notes(Dataset):
    """Does a note mention the mark?"""

    def __init__(self, tokens, labels):
        self.tokens, self.labels = tokens, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def made_up(count=1000):
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(MARK + 1, WORDS, (count, LENGTH), generator=random)
    marked = torch.rand(count, generator=random) < 0.5
    places = torch.randint(0, LENGTH, (count, 4), generator=random)
    tokens[marked] = tokens[marked].scatter(1, places[marked], MARK)
    return tokens, marked.long()


def load_notes(directory=None):
    tokens, labels = made_up() if directory is None else torch.load(directory / "notes.pt", weights_only=True)
    bounds = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
    parts = {name: slice(*(int(share * len(labels)) for share in ends)) for name, ends in bounds.items()}
    return {name: Notes(tokens[part], labels[part]) for name, part in parts.items()}


def compute_metrics(answers):
    return {"accuracy": (answers.predictions.argmax(-1) == answers.label_ids).mean()}


# ---- what you add: a task


class Mentions(TransformersTask):
    model = staticmethod(make_model)
    arguments = {"weight_decay": 0.01}  # noqa: RUF012 - further arguments of TrainingArguments
    options = {"compute_metrics": compute_metrics}  # noqa: RUF012 - further arguments of Trainer

    def data(self, source: DataSource):
        return load_notes(source.directory)
