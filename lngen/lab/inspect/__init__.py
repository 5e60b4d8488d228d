"""What a kernel set uses: the resources and the machine code of each kernel, and the memory traffic of a call."""
