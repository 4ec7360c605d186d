"""What several tests share. Nothing here imports vllm."""
