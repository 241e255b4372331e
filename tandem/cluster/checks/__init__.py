"""What can be wrong with the machine, the configuration or the model, found before anything starts."""
