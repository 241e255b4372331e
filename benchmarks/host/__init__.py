"""What a step costs beside the model: sampling, the batch's bookkeeping, an event of a handoff. No model, no server."""
