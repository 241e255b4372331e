"""Generated from `protos/tandem/v1` by `make stubs`."""
