"""How near prefill and decode on one GPU come to what it was measured to do."""
