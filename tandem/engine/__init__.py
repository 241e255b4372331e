"""The model on its KV arena: forwards of ragged batches over pages, and sampling."""
