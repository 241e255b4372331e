"""`tandem bench advise`: whether splitting prefill and decode serves a load better, on clusters of one size."""
