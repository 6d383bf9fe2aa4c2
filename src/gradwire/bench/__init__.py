"""The benchmark: experiments, training runs, their traces, statistics and reports."""
