"""From observations and dataset windows to tensors and back, for training and acting alike."""
