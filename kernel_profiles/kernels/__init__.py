"""How long kernels and transfers take, from tables or from bytes and FLOPs."""
