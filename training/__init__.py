"""The parts of train.py: what a run is set up with, what it trains, and one optimizer step.

The threads of a process that trains:

    main thread                enqueues steps; waits for the GPU to read numbers (one step late), evaluate or save
    planner                    shares labels and flags of the next batch, uploads the active classes (training/ahead.py)
    decoder                    hears from the fork that decodes into pinned buffers, or decodes (data/loader.py)
    reader                     asks the storage for more
    worker                     decodes the images of an evaluation, or draws the first class centres (utils/parallel.py)
    checkpoint                 writes a copy of the state to the disk (utils/checkpoint/writer.py)
    rendezvous                 meets the other processes
    notice                     says that they are waited for
    signals                    notes signals to stop (utils/program.py)
    parent                     looks for torchrun
    signs of life              shows that this process works, while others wait
    watchdog                   ends a process that hangs, or on CUDA whose next rank is gone (utils/distributed/watchdog.py)
    watchdog's signs of life   publishes this rank's step
    watchdog of the next rank  notes its signs of life; only on CUDA
    watchdog's question        asks where the other ranks were; only at an error
    watchdog's last word       tells how this rank ends; only on CUDA
    tensorboard                writes the event file
"""
