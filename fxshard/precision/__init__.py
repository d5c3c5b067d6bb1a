"""MXFP8: the format, its quantizers, and the policy that chooses what runs in it."""
