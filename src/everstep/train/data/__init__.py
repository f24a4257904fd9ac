"""The data position: which batch comes next, exactly.

Owns: the feed that yields batches over epochs, and a position that can be taken between any two
batches and put back in another process. Never does: touch the user's loader, the process's RNG
streams (each is left as found), models or stores. Called by: the step loop.

``feed``         DataFeed, the one public class
``recognise``    which kind of source a loader is, and which are refused
``sources``      how an epoch is opened, and opened again at batch k
``loaders``      the same for torch's DataLoader
``tap``          the sampler's indices counted, digested and skipped
``generators``   generators the user keeps in loaders, samplers and datasets
``entangled``    tells when an iterable shares an RNG stream with the training code
"""

from everstep.train.data.feed import DataFeed

__all__ = ["DataFeed"]
