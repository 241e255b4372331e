"""The law by which prompts are placed and computed, beside the best constants of each load, in the simulator."""
