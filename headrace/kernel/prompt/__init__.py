"""What prompts need of the GPU beyond PyTorch's own kernels."""
