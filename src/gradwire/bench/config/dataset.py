"""The data set of an experiment: the source of the text and its division into samples."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import digest
from gradwire.base.strict import Strict
from gradwire.bench.config.values import Count
from gradwire.lm.data import sources
from gradwire.lm.data.defaults import (
    LENGTH,
    MAX_LENGTH,
    SHARD_SIZE,
    VAL_FRACTION,
    VOCAB_SIZE,
    VOCABULARY,
    check_shard,
)


class Dataset(Strict, extra="allow"):
    """The source of the text and its division into samples.

    Other keys are options of the source (`gradwire.lm.data.sources`), which checks them.
    """

    source: str = Field("pydocs", description="source of the corpus; its options are keys beside it")
    max_mb: float | None = Field(None, gt=0, description="MB of text after which the download stops")
    tokenizer: str = Field("bpe", description="`bpe` trains one on the corpus; else a tokenizer folder such as GPT-2's")
    vocab_size: int = Field(VOCAB_SIZE, **VOCABULARY.limits, description="vocabulary of a trained tokenizer")
    max_length: int = Field(MAX_LENGTH, **LENGTH.limits, description="largest number of tokens in a sample")
    shard_size: Count = Field(SHARD_SIZE, description="samples per shard file")
    val_fraction: float = Field(VAL_FRACTION, gt=0, lt=1, description="share of the documents held out for validation")

    @model_validator(mode="after")
    def _the_source_takes_its_options(self) -> Self:
        try:
            known = sources.source_class(self.source).model_fields
            for key in self.source_options.keys() - known.keys():
                raise unknown(f"key of a dataset with source {self.source}", key, [*Dataset.model_fields, *known])
            sources.build(self.source, self.source_options)
        except BadInput as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    @model_validator(mode="after")
    def _a_shard_fits_into_memory(self) -> Self:
        try:
            check_shard(self.max_length, self.shard_size)
        except BadInput as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    @property
    def source_options(self) -> dict[str, Any]:
        """The options of the source, as given."""
        return self.model_extra or {}

    @property
    def built(self) -> sources.Source:
        """The source with its options."""
        return sources.build(self.source, self.source_options)

    @property
    def corpus_folder(self) -> str:
        """``<label of the source>/<digest of the corpus settings>``, below ``results/data/``.

        Raises:
            BadInput: If the source cannot be read.
        """
        source = self.built
        return f"{source.label}/{digest([self.source, source.content(), self.max_mb])}"

    @property
    def tokens_folder(self) -> str:
        """Digest of the tokenizer and sample settings; a folder below the corpus's."""
        return digest([self.tokenizer, self.vocab_size, self.max_length, self.shard_size, self.val_fraction])
