"""Checkpoints that come quantised: what their files mean, and how layers are held until they are packed."""
