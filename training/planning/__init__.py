"""What a run will need: floating-point operations, memory, and whether it fits."""
