"""Learning from rewards: prompts, answers that the model samples, and what they are worth."""
