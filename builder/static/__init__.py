"""What can be known of the wheels of a lock without installing them: whether they link, and which GPUs they have code for."""
