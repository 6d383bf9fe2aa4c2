"""The library: compressors, collectives and parallel strategies for the gradients of a training script."""
