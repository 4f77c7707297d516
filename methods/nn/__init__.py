"""Code that the methods share; the first line of each file says what is in it.

A method begins with `base` (its hooks), `converter` and `conversion` (the choice of the linears),
and `config` (options). A sparse layer is in `derived` and `linear`, its variants in `phases`,
`compressed` and `at_run_time`, and its products in `gemms`, `fp8_gemms` and `compressed_gemms`,
whose `operands` may be packed, as `acceleration` decides. `sharding` holds layers under FSDP2.
"""
