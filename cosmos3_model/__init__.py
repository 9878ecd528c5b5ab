"""The Cosmos3 network: towers, attention, sequence layout, schedule, VAE, prompts and the fused reference run."""
