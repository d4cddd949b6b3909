"""Tasks: prompts with a verifiable reward. Bundled ones, and those that a user names as `module:task`."""
