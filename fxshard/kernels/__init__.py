"""Mixture-of-experts MLPs as one operator: grouped GEMM, gated activation, grouped GEMM, and their backward.

``glu`` is the mathematics of the activation, ``op`` the operators that graphs contain, ``choose`` says which
implementation runs where; ``by_torch``, ``by_triton``, ``by_te`` and ``te_mlp`` are those (``te_gates`` is what
the last one asks for), ``costs`` is what was measured of them on which device, ``padding`` gives them the
groups they ask for, ``report`` is what users read.
``hopper_kernels`` and ``activation_kernels`` run on GPUs, ``launch`` starts them.
"""
