"""Fused forms for CUDA, in Triton. Without a GPU, Triton's interpreter runs them on CPU tensors (TRITON_INTERPRET=1).

They give the plain forms' bits: launched with ``enable_fp_fusion=False``, they divide by ``tl.div_rn``.
"""
