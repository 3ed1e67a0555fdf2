"""Speed, measured: what ``dzrobot bench`` does, part by part, each in a process of its own."""
