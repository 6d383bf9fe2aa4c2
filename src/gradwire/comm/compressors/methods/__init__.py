"""One file per compressor, named as the compressor; the registry finds them by listing this folder."""

FAMILIES = {
    **dict.fromkeys(("int8", "qsgd", "bf16", "fp16", "hadamard"), "quantizers"),
    **dict.fromkeys(("signsgd", "onebit"), "signs"),
    **dict.fromkeys(("topk", "randomk"), "sparse"),
}
"""The module of a method's kernels, where it is not the method's name."""
