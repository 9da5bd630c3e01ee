"""What a GPU host has, what a stack needs of it, and whether the two go together: before gigabytes are pulled."""
