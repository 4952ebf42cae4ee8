"""The backend ``hpctrain`` of torch.distributed."""
