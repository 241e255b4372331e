"""A cluster in virtual time: what ships decides, and steps and transfers take as long as a model of them says."""
