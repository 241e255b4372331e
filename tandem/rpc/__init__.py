"""Where the wire meets the domain: generated stubs, conversion, and who may say what on a channel."""
