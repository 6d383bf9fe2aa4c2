"""Cut a corpus into paragraphs: ``python benchmarks/paragraphs.py CORPUS TOPICS OUTPUT``.

The beginning (160 characters) of each paragraph of at least 120 becomes a document, for the ``TOPICS``
documents with the most such paragraphs, each with its first 24. Both splits then have paragraphs of the same topics.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire.base.files import write_json
from gradwire.lm.data import corpus

SHORTEST, LONGEST, MOST = 120, 160, 24  # characters, characters, paragraphs


def paragraphs(text: str) -> list[str]:
    """Return the beginnings of the long paragraphs of a text, each on one line."""
    return [" ".join(part.split())[:LONGEST] for part in text.split("\n\n") if len(part) >= SHORTEST]


def main(source: Path, topics: int, output: Path) -> None:
    """Write the new corpus."""
    of_documents = {document.id: paragraphs(document.body) for document in corpus.documents(source)}
    longest = sorted(of_documents, key=lambda id_: -len(of_documents[id_]))[:topics]
    made = [
        {"id": f"{id_}/{number}", "title": "", "text": text}
        for id_ in longest
        for number, text in enumerate(of_documents[id_][:MOST])
    ]
    write_json(output, made)
    print(f"{output}: {len(made)} paragraphs of {len(longest)} documents")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("topics", type=int)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    main(args.corpus, args.topics, args.output)
