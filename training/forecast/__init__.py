"""How long a step or a plan takes on a device, predicted from a rehearsal without memory."""
