"""The verbs, one per step of the DAG: their modules, and their lines in ``--help``; see `bench.command`."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A verb's module and its line in ``--help``."""

    module: str
    help: str


VERBS = {
    "init": Verb("gradwire.bench.init", "write a configuration with every field, its default and its meaning"),
    "run": Verb("gradwire.bench.workflow.run", "run an experiment from its file to its page"),
    "download": Verb("gradwire.lm.data.download", "fetch or extract a corpus as a JSON array of id, title, text"),
    "tokenize": Verb("gradwire.lm.data.tokenize", "train or load a tokenizer and write token shards"),
    "launch": Verb("gradwire.bench.launch.launch", "check a verb's input and run it on several ranks"),
    "train": Verb("gradwire.bench.training.train", "train a language model under a compressor and a strategy"),
    "trace": Verb("gradwire.bench.trace.trace", "read a run's profiler traces into profile.json"),
    "perplexity": Verb("gradwire.bench.training.perplexity", "compute the token-weighted perplexity of a saved model"),
    "generate": Verb("gradwire.bench.training.generate", "continue a prompt with a saved model"),
    "grads collect": Verb(
        "gradwire.attribution.collect.collect", "collect projected per-sample gradients with their sample ids"
    ),
    "grads aggregate": Verb("gradwire.attribution.store.aggregate", "merge the ranks' gradients into one matrix"),
    "grads validate": Verb("gradwire.attribution.collect.validate", "check that row i is the gradient of sample id i"),
    "grads influence": Verb(
        "gradwire.attribution.query.influence", "rank training samples by their influence on validation samples"
    ),
    "grads score": Verb(
        "gradwire.attribution.query.score", "score every sample for a few queries in one pass, without storing rows"
    ),
    "grads query": Verb(
        "gradwire.attribution.query.query", "find the samples whose gradients are nearest to that of a text"
    ),
    "grads less": Verb("gradwire.bench.grads_less", "select training data for validation data, as LESS does"),
    "grads factors": Verb("gradwire.attribution.collect.factors", "compute the curvature for gradients of type ekfac"),
    "grads run": Verb("gradwire.bench.grads_run", "collect, aggregate and validate in one call"),
    "norms": Verb("gradwire.attribution.collect.norms", "compute the norm of every sample's gradient"),
    "compressors": Verb("gradwire.comm.compressors.listing", "list compressors and their options"),
    "bench compressors": Verb("gradwire.bench.codecs.verb", "time every compressor and compare with memory bandwidth"),
    "predict": Verb(
        "gradwire.bench.report.predict", "predict step times and crossovers at any world size and bandwidth"
    ),
    "doctor": Verb("gradwire.bench.doctor", "show what this machine supports, and test several ranks on it"),
    "report": Verb("gradwire.bench.report.report", "write a page of figures and tables over all runs of an experiment"),
    "compare": Verb("gradwire.bench.report.compare", "compare two experiments, paired by seed, with statistical tests"),
    "status": Verb(
        "gradwire.bench.report.rows.status", "show which runs are done, running, failed or pending, and the time left"
    ),
    "summarize": Verb("gradwire.bench.report.summarize", "write one table over all runs of an experiment"),
}
