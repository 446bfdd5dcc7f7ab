"""What a user of tp_kernels writes: models made of its layers, and a script that trains them."""
