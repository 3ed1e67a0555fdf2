"""What a training run costs: floating-point operations, memory, and whether it fits the devices."""
