"""What users call: compile, shard, plan, the torch.compile backend and the module they get back."""
