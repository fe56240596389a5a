"""What all roles share: context, retries, effects, authorisation, files between hosts."""
