"""Chat templates and tokenizers: conversion of conversations to tokens, with a turn index for each token."""
