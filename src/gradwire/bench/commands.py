"""The commands, one per step of the DAG: their modules, and their lines in ``--help``; see `bench.command`."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A command's module and its line in ``--help``."""

    module: str
    help: str


COMMANDS = {
    "init": Entry("gradwire.bench.init", "write a configuration with every field, its default and its meaning"),
    "run": Entry("gradwire.bench.workflow.run", "run an experiment from its file to its page"),
    "download": Entry("gradwire.lm.data.download", "fetch or extract a corpus as a JSON array of id, title, text"),
    "tokenize": Entry("gradwire.lm.data.tokenize", "train or load a tokenizer and write token shards"),
    "launch": Entry("gradwire.bench.launch.launch", "check a command's input and run it on several ranks"),
    "train": Entry("gradwire.bench.training.train", "train a language model under a compressor and a strategy"),
    "trace": Entry("gradwire.bench.trace.trace", "read a run's profiler traces into profile.json"),
    "perplexity": Entry("gradwire.bench.training.perplexity", "compute the token-weighted perplexity of a saved model"),
    "generate": Entry("gradwire.bench.training.generate", "continue a prompt with a saved model"),
    "grads collect": Entry(
        "gradwire.attribution.collect.collect", "collect projected per-sample gradients with their sample ids"
    ),
    "grads aggregate": Entry("gradwire.attribution.store.aggregate", "merge the ranks' gradients into one matrix"),
    "grads validate": Entry("gradwire.attribution.collect.validate", "check that row i is the gradient of sample id i"),
    "grads influence": Entry(
        "gradwire.attribution.query.influence", "rank training samples by their influence on validation samples"
    ),
    "grads score": Entry(
        "gradwire.attribution.query.score", "score every sample for a few queries in one pass, without storing rows"
    ),
    "grads query": Entry(
        "gradwire.attribution.query.query", "find the samples whose gradients are nearest to that of a text"
    ),
    "grads less": Entry("gradwire.bench.grads_less", "select training data for validation data, as LESS does"),
    "grads factors": Entry("gradwire.attribution.collect.factors", "compute the curvature for gradients of type ekfac"),
    "grads run": Entry("gradwire.bench.grads_run", "collect, aggregate and validate in one call"),
    "norms": Entry("gradwire.attribution.collect.norms", "compute the norm of every sample's gradient"),
    "compressors": Entry("gradwire.comm.compressors.listing", "list compressors and their options"),
    "bench compressors": Entry(
        "gradwire.bench.codecs.bench", "time every compressor and compare with memory bandwidth"
    ),
    "predict": Entry(
        "gradwire.bench.report.predict", "predict step times and crossovers at any world size and bandwidth"
    ),
    "doctor": Entry("gradwire.bench.doctor", "show what this machine supports, and test several ranks on it"),
    "report": Entry(
        "gradwire.bench.report.report", "write a page of figures and tables over all runs of an experiment"
    ),
    "compare": Entry(
        "gradwire.bench.report.compare", "compare two experiments, paired by seed, with statistical tests"
    ),
    "status": Entry(
        "gradwire.bench.report.rows.status", "show which runs are done, running, failed or pending, and the time left"
    ),
    "summarize": Entry("gradwire.bench.report.summarize", "write one table over all runs of an experiment"),
}
