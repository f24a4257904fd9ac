"""What a rank holds and owns: read into flat named tensors, copied at a cut, and put back.

Never does: I/O, collectives on the save path (R2), anything with keeper or store. Called by:
train and integrations.
"""
