"""GPU kernels in the CuTe DSL: `warp` for every architecture, `sm90` for Hopper. Importing this package imports none of them."""
