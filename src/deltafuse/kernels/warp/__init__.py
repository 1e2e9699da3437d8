"""Kernels of warp-level instructions only: one source for every architecture from sm_80 on."""
