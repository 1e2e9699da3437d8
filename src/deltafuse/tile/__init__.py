"""Device pieces that kernels share, one idea a file."""
