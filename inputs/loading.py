"""Question files to examples and to `datasets.Dataset`."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from inputs.errors import DatasetError
from inputs.examples import Example
from inputs.reading import read_records
from inputs.shapes import is_unanswerable, parse_record

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

INVENTED_PATH = Path(__file__).parent / "data" / "invented_musique.jsonl"
"""Our own data set of invented two-hop questions, in MuSiQue's shape."""


def load_examples(path: str | Path) -> list[Example]:
    """Read the questions of `path`, MuSiQue's JSON lines or CacheBlend's JSON array, in file order.

    MuSiQue questions marked `"answerable": false` are left out, and their number is logged: scoring them
    needs an answer that their contexts do not hold. CacheBlend's questions have no id and get
    `<file name>-<place in the file, from 1>`.

    Raises DatasetError, naming the file and the line or item, if the file cannot be used.
    """
    path = Path(path)
    examples: list[Example] = []
    places: dict[str, str] = {}
    left_out = 0
    for record in read_records(path):
        if is_unanswerable(record):
            left_out += 1
            continue
        example = parse_record(record, fallback_id=f"{path.stem}-{record.position}")
        if example.id in places:
            raise DatasetError(
                f"{record.place}: the id {example.id!r} is taken by {places[example.id]}; ids must be unique."
            )
        places[example.id] = record.place
        examples.append(example)
    if left_out:
        logger.info("%s: left out %d unanswerable questions, kept %d", path, left_out, len(examples))
    if not examples:
        raise DatasetError(f"{path}: every question is marked unanswerable; give a file with answerable ones.")
    return examples


def load_invented() -> list[Example]:
    """Read our own data set of invented two-hop questions."""
    return load_examples(INVENTED_PATH)


def load_dataset(path: str | Path) -> "Dataset":
    """Read what `load_examples` reads as a `datasets.Dataset`, one row a question, in memory.

    Features: `id` and `question` string, `answers` list of string, `contexts` list of
    {`title` string, `text` string, `supporting` bool or None}.

    Raises DatasetError as `load_examples` does.
    """
    examples = load_examples(path)
    # Imported here because it takes a second and the examples alone do not need it.
    from datasets import Dataset, Features, List, Value

    context = {"title": Value("string"), "text": Value("string"), "supporting": Value("bool")}
    features = Features(
        {
            "id": Value("string"),
            "question": Value("string"),
            "answers": List(Value("string")),
            "contexts": List(context),
        }
    )
    return Dataset.from_list([asdict(example) for example in examples], features=features)


def load_invented_dataset() -> "Dataset":
    """Read our own data set of invented two-hop questions as a `datasets.Dataset`."""
    return load_dataset(INVENTED_PATH)
