"""What a new author may get wrong. The comment below a class is the error of `forge-env validate`, and its fix.

With `!!` or `--`, it is a finding of the report instead. The file is read by test_mistakes.py.
"""

# ruff: noqa
# fmt: off
from __future__ import annotations

import asyncio
import random
import sys
import threading

import numpy
from pydantic import Field

import forge_env as fe

class Sound(fe.SingleTurnEnvironment):
    api_version = 1
    def task(self, split, index):
        return fe.Task(id=f'{split}-{index}', split=split, prompt=f'Say {index}', gold=str(index))
    def reward(self, task, answer): return float(answer == task.gold)
class TaskDict(Sound):
    def task(self, split, index): return {'id': 'x'}
# TaskDict.task returned a dict -> return an fe.Task
class TaskAsync(Sound):
    async def task(self, split, index): return None
# TaskAsync.task is a coroutine function -> without `async`
class TaskField(Sound):
    def task(self, split, index): return fe.Task(id=index, prompt='x')
# id: should be a valid string, not 0 [
class TaskCrash(Sound):
    def task(self, split, index): import random; return random.Random(0).randint(2, 1)
# mistakes.py:
class TaskSignature(Sound):
    def task(self, split): return fe.Task(id=split, prompt='x')
# TaskSignature.task: too many positional arguments -> write `def task(self, split, index)`
class PromptHuge(Sound):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x' * 11000000, gold='x')
# PromptHuge.prompt returned messages of 11,000,000 characters together -> keep them below 10,000,000
class ToolObject(fe.ToolEnvironment):
    rubric = fe.Rubric([fe.rewards.ExactMatch()])
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x', gold='x')
    def gold_actions(self, task): return [fe.call_tool('find'), 'x']
    @fe.tool
    def find(self): return [{'found': Sound()}]
# tool 'find' returned a Sound, which a model can't read -> return text
class TasksGenerator(fe.SingleTurnEnvironment):
    reward = fe.rewards.ExactMatch()
    def tasks(self, split): yield fe.Task(id='1', prompt='x')
# TasksGenerator.tasks returned a generator -> return a list
class TasksEmpty(TasksGenerator):
    def tasks(self, split): return []
class NoTasks(fe.SingleTurnEnvironment): reward = fe.rewards.ExactMatch()
# NoTasks has no tasks -> define `task
class NoReward(fe.SingleTurnEnvironment):
    def task(self, split, index): return fe.Task(id=str(index), prompt='x')
# NoReward has no reward function -> define `reward(self, task, completion)`, or set `rubric
class RubricFunction(NoReward): rubric = len
# RubricFunction.rubric is a builtin_function_or_method -> set `rubric
class RewardNone(Sound):
    def reward(self): return None
# reward function 'reward' returned None -> finite number
class RewardExits(Sound):
    def reward(self): sys.exit('no grader')
# reward function 'reward' raised SystemExit on task 'train-0': no grader [
class RewardCancels(Sound):
    async def reward(self): raise asyncio.CancelledError
# reward function 'reward' raised CancelledError on task 'train-0'
class PromptText(Sound):
    def prompt(self, task): return 'hello'
# PromptText.prompt returned a str, 'hello' as messages -> give a list
class GoldText(Sound):
    def gold_actions(self, task): return 'hello'
# GoldText.gold_actions returned a str -> return a list
class NoInit(Sound):
    def __init__(self, config=None, sandboxes=None): self.x = 1
# NoInit.__init__ does not call its base's -> super().__init__
class InitArguments(Sound):
    def __init__(self): super().__init__()
# InitArguments.__init__: too many -> super().__init__
class InitCrash(Sound):
    def __init__(self, config=None, **context): raise RuntimeError('no database')
# InitCrash.__init__ raised RuntimeError: no database [
class SetupFirst(Sound):
    async def setup(self, task): raise RuntimeError('no server')
    async def cleanup(self): self.server.close()
class TasksMapping(TasksGenerator):
    def tasks(self, split): return {'a': 1}
# TasksMapping.tasks returned a dict -> return a list
class TasksRows(TasksGenerator):
    def tasks(self, split): return [{'prompt': 'x'}]
# TasksRows.task returned a dict -> return an fe.Task
class CountText(Sound):
    def num_tasks(self, split): return '3'
# CountText.num_tasks returned '3' -> None: endless
class CountNegative(Sound):
    def num_tasks(self, split): return -1
# CountNegative.num_tasks returned -1 -> None: endless
class CountFraction(Sound):
    def num_tasks(self, split): return 3.0
# CountFraction.num_tasks returned 3.0 -> None: endless
class SplitsText(Sound): splits = 'train'
# splits is 'train' -> ("train", "eval")
class HighestText(Sound): max_reward = '1'
# max_reward is '1' -> a number
class FinalAsync(Sound):
    async def is_final(self, message): return True
# FinalAsync.is_final is a coroutine function -> without `async`
class TaskNone(Sound):
    def task(self, split, index): return None
# TaskNone.task returned a NoneType -> return an fe.Task
class TaskWithoutId(Sound):
    def task(self, split, index): return fe.Task(prompt='x')
# id: missing [
class TaskUnknownField(Sound):
    def task(self, split, index): return fe.Task(id='1', prompt='x', answer='x')
# a task has no `answer`: write data={"answer": ...} [task,
class GoldNumber(Sound):
    def task(self, split, index): return fe.Task(id='1', prompt='x', gold=3)
# gold: should be a valid string, not 3 [
class RewardNan(Sound):
    def reward(self): return float('nan')
# reward function 'reward' returned nan -> finite number
class RewardList(Sound):
    def reward(self): return [1.0]
# reward function 'reward' returned [1.0] -> finite number
class PromptNone(Sound):
    def prompt(self, task): return None
# PromptNone.prompt returned a NoneType, None as messages -> give a list
class PromptDictionaries(Sound):
    def prompt(self, task): return [{'role': 'user', 'content': 'x'}]
# PromptDictionaries.prompt returned a list, [{'role' -> give a list
class PromptRole(Sound):
    def prompt(self, task): return [fe.Message(role='human', content='x')]
# role: should be 'system', 'user', 'assistant' or 'tool', not 'human' [
class RespondText(Sound):
    def is_final(self, message): return False
    async def respond(self, message): return 'more'
# RespondText.respond returned a str, 'more' as messages -> give a list
class ConfigChanged(Sound):
    def task(self, split, index): self.config.seed = 3; return super().task(split, index)
# seed: instance is frozen
class ToolAnyArguments(ToolObject):
    @fe.tool
    def find(self, *args: str): 'Find something.'
# tool 'find': *args: 'str' is not a named parameter -> name every parameter
class ToolAnyNames(ToolObject):
    @fe.tool
    def find(self, **options: str): 'Find something.'
# tool 'find': **options: 'str' is not a named parameter -> name every parameter
class ToolUntyped(ToolObject):
    @fe.tool
    def find(self, what): 'Find something.'
# tool 'find': parameter 'what' has no type hint -> add one
class ToolTwice(ToolObject):
    @fe.tool(name='find')
    def search(self): return 'x'
# ToolTwice has two tools named 'find' -> rename one
class ToolCrash(ToolObject):
    @fe.tool
    def find(self): return {}['x']
# -0': 'x' [find, -> raise fe.ToolError
class ApiText(Sound): api_version = '1'
# api_version is '1' -> write 1
class ConfigDict(Sound): config_class = dict
# config_class is <class 'dict'> -> derive it
class NoStep(fe.Environment):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x')
# NoStep lacks reset, step -> define them
class Whole(NoStep):
    given = ([], 0.0, True, False, {})
    async def reset(self, *, seed=None, options=None): return ([fe.Message(role='user', content='x')], {})
    async def step(self, action): return self.given
class ResetList(Whole):
    async def reset(self, *, seed=None, options=None): return [fe.Message(role='user', content='x')]
# ResetList.reset returned a list -> (messages, info)
class ResetSync(Whole):
    def reset(self, *, seed=None, options=None): return ([], {})
# ResetSync.reset is a plain function -> async def reset
class StepFour(Whole): given = ([], 0.0, True, {})
# StepFour.step returned a tuple, ([], 0.0, True, {}) -> (messages, reward
class StepText(Whole): given = ('text', 0.0, True, False, {})
# StepText.step returned a str, 'text' as messages -> give a list
class StepNan(Whole): given = ([], float('nan'), True, False, {})
# StepNan.step returned the reward a float, nan -> finite
class StepBoth(Whole): given = ([], 0.0, True, True, {})
# StepBoth.step returned terminated and truncated together -> that a limit was reached
class StepInfo(Whole): given = ([], 0.0, True, False, None)
# StepInfo.step returned a NoneType, None as info -> a dictionary
class Endless(Whole): given = ([fe.Message(role='user', content='again')], 0.0, False, False, {})
# has not ended after 1000 turns -> config.max_turns
class Find(fe.ToolEnvironment):
    api_version = 1
    rubric = fe.Rubric([fe.rewards.ExactMatch()])
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x', gold=f'x{index}')
    def gold_actions(self, task): return [fe.call_tool('find'), str(task.gold)]
    @fe.tool
    def find(self):
        """Find something."""
        return 'x'
class ToolBytes(Find):
    @fe.tool
    def find(self): return b'x\xff'
# tool 'find' returned bytes, which a model can't read -> decode them
class ToolNotAwaited(Find):
    @fe.tool
    def find(self): return self.look()
    async def look(self): return 'x'
# tool 'find' returned coroutine, which a model can't read -> await it
class ToolNoSelf(Find):
    @fe.tool
    def find(what: str): return what
# the tool ToolNoSelf.find has no `self` -> write `def find(self, what, ...)`
class ToolNothing(Find):
    @fe.tool
    def find(): return 'x'
# the tool ToolNothing.find has no `self` -> write `def find(self)`
class ToolUnknownHint(Find):
    @fe.tool
    def find(self, what: Nothing): return 'x'
# its type hints can't be resolved: name 'Nothing' is not defined -> import what they name
class ToolThreadHint(Find):
    @fe.tool
    def find(self, what: threading.Thread): return 'x'
# tool 'find': Unable to generate pydantic-core schema for <class 'thr -> use JSON types
class ToolGenerator(Find):
    @fe.tool
    def find(self): yield 'x'
# tool 'find' is a generator -> return the whole answer
class ToolForgotten(Find):
    @fe.tool
    def find(self): return self.nothing
# -0': 'ToolForgotten' object has no attribute 'nothing' [find, -> raise fe.ToolError
class ToolSubmitsNumber(Find):
    @fe.tool
    def find(self): self.submit(3); return 'x'
# ToolSubmitsNumber.submit received a int -> give a text
class ToolStep(Find):
    @fe.tool
    def step(self, what: str): return 'x'
# the tool ToolStep.step hides ToolEnvironment.step -> step_tool
class ToolAsks(Find):
    @fe.tool
    def find(self): raise EOFError('EOF when reading a line')
# -0': EOF when reading a line [find, -> raise fe.ToolError
class ToolDefaultNone(Find):
    @fe.tool
    def find(self, most: int=None): return 'x'
# tool 'find': the default of 'most' should be a valid integer, not None -> ... | None =
class ToolDefaultText(Find):
    @fe.tool
    def find(self, most: int='ten'): return 'x'
# tool 'find': the default of 'most' should be a valid integer -> correct the default
class TextConfig(fe.ToolEnvironmentConfig): size: int = 'large'
class OptionText(Find): config_class = TextConfig
# TextConfig.size: its default should be a valid integer -> correct the default
class RangeConfig(fe.ToolEnvironmentConfig): size: int = Field(0, ge=1)
class OptionOutOfRange(Find): config_class = RangeConfig
# RangeConfig.size: its default should be greater than or equal to 1, not 0 -> the default
class ListConfig(fe.ToolEnvironmentConfig): levels: tuple[int, ...] = [1, 2]
class OptionList(Find): config_class = ListConfig
# ListConfig.levels: its default should be (1, 2), not [1, 2] -> correct the default
class GoldDictionary(Find):
    def gold_actions(self, task): return [{'tool': 'find'}]
# GoldDictionary.gold_actions: an action is a text or a Message, not dict -> fe.call_tool(...)
class GoldNothing(Find):
    def gold_actions(self, task): return [None]
# GoldNothing.gold_actions: an action is a text or a Message, not NoneType -> give texts
class GoldAsync(Find):
    async def gold_actions(self, task): return ['x']
# GoldAsync.gold_actions is a coroutine function -> without `async`
class SetupSignature(Find):
    async def setup(self): pass
# SetupSignature.setup: too many positional -> write `async def setup(self, task)`
class SetupAwaitsNothing(Find):
    async def setup(self, task): await None
# SetupAwaitsNothing.setup raised TypeError on task
class SetupSubmits(Find):
    async def setup(self, task): self.submit('x')
# SetupSubmits.submit was called before the agent -> in a tool or `respond`
class SetupYields(Find):
    def setup(self, task): yield
# SetupYields.setup contains `yield` -> release resources in `cleanup`
class CountersList(Find):
    def counters(self): return [1]
# CountersList.counters returned a list -> a dictionary of numbers
class SetupRunsLoop(Find):
    async def setup(self, task):
        work = asyncio.sleep(0)
        try:
            asyncio.run(work)
        finally:
            work.close()
# SetupRunsLoop.setup raised RuntimeError on task
class PromptSignature(Find):
    def prompt(self): return []
# PromptSignature.prompt: too many positional -> write `def prompt(self, task)`
class RespondNone(Find):
    def is_final(self, message): return False
    def respond(self, message): return None
# RespondNone.respond returned a NoneType, None as messages -> give a list
class ResetAlone(Find):
    async def reset(self, *, seed=None, options=None): return ([fe.Message(role='user', content='x')], {})
# step() without a running episode -> return await super().reset(...)
class RubricNone(fe.ToolEnvironment):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x')
# RubricNone has no rubric -> set `rubric
class RubricClass(Find): rubric = fe.Rubric
# RubricClass.rubric is a type -> set `rubric
class RubricWeights(Find):
    def __init__(self, config=None, **context):
        self.rubric = fe.Rubric([fe.rewards.ExactMatch()], weights=[1, 2])
        super().__init__(config, **context)
# a rubric has 1 reward functions but 2 weights -> give one for each
class CountAsync(Find):
    async def num_tasks(self, split): return 3
# CountAsync.num_tasks is a coroutine function -> without `async`
class CountTrue(Find):
    def num_tasks(self, split): return True
# CountTrue.num_tasks returned True -> None: endless
class CountTooHigh(Find):
    def num_tasks(self, split): return 3
    def task(self, split, index): return [fe.Task(id=f'{split}-1', split=split, prompt='x')][index]
# CountTooHigh.task raised IndexError
class TasksAttribute(fe.ToolEnvironment):
    tasks = [fe.Task(id='1', prompt='x')]
    api_version = 1
    rubric = Find.rubric
# TasksAttribute.tasks is a list -> write `def tasks(self, split)`
class TasksNone(fe.ToolEnvironment):
    api_version = 1
    rubric = Find.rubric
    def tasks(self, split): pass
# TasksNone.tasks returned a NoneType -> return a list
class TasksAsync(TasksNone):
    async def tasks(self, split): return []
# TasksAsync.tasks is a coroutine function -> without `async`
class TasksText(TasksNone):
    def tasks(self, split): return 'abc'
# TasksText.tasks returned a str -> return a list
class TasksNoFile(TasksNone):
    def tasks(self, split): return fe.load_tasks('nowhere.jsonl', split)
# there is no file nowhere.jsonl -> check `dataset.path`
class SplitsNone(Find): splits = ()
# SplitsNone.splits is () -> write ("train", "eval")
class SystemList(Find): system_prompt = ['x']
# SystemList.system_prompt is ['x'] -> write a text
class DataList(Find):
    def task(self, split, index): return fe.Task(id=str(index), prompt='x', data=[1])
# data: should be a mapping of keys to values, not [1] [task,
class ApiOfTomorrow(Find): api_version = 99
# was written for environment API 99, this is API 1 -> update forge-env
class ConfigObject(Find): config_class = fe.EnvironmentConfig()
# config_class is EnvironmentConfig( -> derive it
class NoEnvironment: pass
# is not a subclass of fe.Environment
class FewerConfig(fe.EnvironmentConfig): size: int = 3
class ConfigOfLess(Find): config_class = FewerConfig
# config_class is <class 'tests.forge_env. -> derive it from fe.ToolEnvironmentConfig
class TaskSwapped(Find):
    def task(self, index, split): return fe.Task(id=f'{split}-{index}', prompt='x')
# TaskSwapped.task: takes self, index, split -> write `def task(self, split, index)`
class OwnTurns(Find):
    async def setup(self, task): self.turns = 'none'
# OwnTurns.setup made self.turns a str -> choose another
class OwnMessages(Find):
    async def setup(self, task): self.messages = {}
# OwnMessages.setup made self.messages a dict -> choose another
class OwnConfig(Find):
    async def setup(self, task): self.config = {'size': 3}
# OwnConfig.reset made self.config a dict -> choose another
class OwnAnswer(Find): answer = None
# OwnAnswer.answer hides ToolEnvironment.answer -> call it something else
class Boxed(fe.SandboxEnvironment):
    api_version = 1
    rubric = fe.Rubric(lambda: 0.5)
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x')
class SpecDictionary(Boxed): sandbox_spec = {'packages': ['x']}
# SpecDictionary.sandbox_spec is a dict -> write fe.SandboxSpec
class ToolNotMade(Boxed): bash = fe.tools.bash
# ToolNotMade.bash is not a tool yet -> write `bash = fe.tools.bash()`
class FilesAsync(Boxed):
    async def files(self, task): return {}
# FilesAsync.files is a coroutine function -> without `async`
class Contract(fe.Environment):
    api_version = 1
    given = ([], 0.0, True, False, {})
    said = {}
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x')
    async def reset(self, *, seed=None, options=None): return ([fe.Message(role='user', content='x')], self.said)
    async def step(self, action): return self.given
class SeatStranger(Contract):
    seats = ('a', 'b')
    said = {'seat': 'c'}
# SeatStranger.reset returned the seat a str, 'c' -> one of a, b
class SeatMissing(Contract): seats = ('a', 'b')
# SeatMissing.reset returned the seat a str, '' -> one of a, b
class SeatsText(Contract): seats = 'ab'
# SeatsText.seats is 'ab' -> write ("first", "second")
class SeatRewards(Contract):
    seats = ('a', 'b')
    said = {'seat': 'a'}
    given = ([], 0.0, True, False, {'rewards': {'c': 1.0}})
# SeatRewards.step returned a dict, {'c': 1.0} as info['rewards'] -> finite numbers by seat
class MetricText(Contract): given = ([], 0.0, True, False, {'metrics': {'length': 'long'}})
# MetricText.step returned a dict, {'length': 'long'} as info['metrics'] -> give finite numbers of at most 1e+100
class StepWord(Contract): given = ([], 0.0, 'done', False, {})
# StepWord.step returned a str, 'done' as terminated -> give True or False
class StepNone(Contract): given = None
# StepNone.step returned a NoneType, None -> return (messages, reward
class StepPlain(Contract):
    def step(self, action): return self.given
# StepPlain.step is a plain function -> async def step
class StepUnfinished(Contract):
    async def step(self, action): raise NotImplementedError
# StepUnfinished.step raised NotImplementedError on task
class ResetSignature(Contract):
    async def reset(self): return ([], {})
# ResetSignature.reset: got an unexpected keyword -> reset(self, *, seed=None, options=None)
class ResetPositional(Contract):
    async def reset(self, seed): return ([], {})
# ResetPositional.reset: got an unexpected keyword -> reset(self, *, seed=None, options=None)
class CloseFails(Contract):
    async def close(self): raise RuntimeError('stuck')
# CloseFails.close raised RuntimeError: stuck [close,
class CountAttribute(Find): num_tasks = 10
# CountAttribute.num_tasks is a int -> write `def num_tasks(self, split)`
class SplitsTwice(Find): splits = ('train', 'train')
# SplitsTwice.splits has 'train' twice -> a unique name
class SeatsTwice(Contract): seats = ('a', 'a')
# SeatsTwice.seats has 'a' twice -> a unique name
class HighestNan(Find): max_reward = float('nan')
# max_reward is nan -> write a number
class ToolsFunctions(Contract): tools = [len]
# ToolsFunctions.tools has a builtin_function_or_method -> put @fe.tool on its methods
class SpecSignature(Boxed):
    def spec_of(self): return fe.SandboxSpec()
# SpecSignature.spec_of: too many positional -> write `def spec_of(self, task)`
class ScoreNumber(Find):
    async def score(self): return 1.0
# ScoreNumber.score returned a float -> set `rubric` to the function
class ScorePlain(Find):
    def score(self, answer): return 1.0
# ScorePlain.score: missing a required argument: 'answer' -> write `async def score(self)`
class TaskProperty(Find):
    @property
    def task(self): return fe.Task(id='1', prompt='x')
# TaskProperty.task is a property -> write `def task(self, split, index)`
class FinalWord(Find):
    def is_final(self, message): return 'no'
# FinalWord.is_final returned 'no' -> return True or False
class DemonstrateAsync(Find):
    async def demonstrate(self, task, rng): return []
# DemonstrateAsync.demonstrate is a coroutine function -> without `async`
class MetricWord(Find): rubric = fe.Rubric([fe.rewards.ExactMatch()], metrics=[lambda: 'long'])
# reward function '<lambda>' returned 'long' on task 'train-0' -> finite number
class RewardWeightNan(Find):
    def __init__(self, config=None, **context):
        self.rubric = fe.Rubric([fe.rewards.ExactMatch()], weights=[float('nan')])
        super().__init__(config, **context)
# the weight nan of 'ExactMatch' is not valid -> give a finite number
class DifficultyWord(Find):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x', difficulty='hard')
# difficulty: should be a valid integer, not 'hard' [task,
class TagsText(Find):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt='x', tags='easy')
# tags: should be a valid list, not 'easy' [task,
class EqualIds(Find):
    def task(self, split, index): return fe.Task(id='one', split=split, prompt=f'x{index}', gold='x')
# !! tasks of 'train': two tasks have the id 'one'
class EqualAcross(Find):
    def task(self, split, index): return fe.Task(id=str(index), split=split, prompt=f'{split} {index}', gold='x')
# !! tasks of 'eval': task '0' is also the id of one of 'train': put the split into the id
class OtherSplit(Find):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', prompt='x', gold='x')
# !! says split='train': set Task.split
class EmptyPrompt(Find):
    def task(self, split, index): return fe.Task(id=f'{split}-{index}', split=split, prompt=' ', gold='x')
# !! has an empty prompt
class ShowsNothing(Find):
    def prompt(self, task): return []
# !! shows the agent nothing at the start
class ByChance(Find):
    def task(self, split, index):
        return fe.Task(id=f'{split}-{index}', split=split, prompt=f'x{random.random()}', gold='x')
# !! task('train', 0) is different in a second environment of the same seed
class DataLambda(Find):
    def task(self, split, index):
        return fe.Task(id=f'{split}-{index}', split=split, prompt='x', gold='x', data={'check': lambda: 1})
# !! data['check'] is a function, which can't be compared or recorded
class DataModule(Find):
    def task(self, split, index):
        return fe.Task(id=f'{split}-{index}', split=split, prompt='x', gold='x', data={'check': threading})
# !! can't be written as JSON
class ToldGold(Find):
    def task(self, split, index):
        gold = f'the watermelon {index}'
        return fe.Task(id=f'{split}-{index}', split=split, prompt=f'Say {gold}.', gold=gold)
# !! task 'train-0' shows the agent its gold solution
class SharedByAll(Find):
    found = []
    @fe.tool
    def find(self): self.found.append('x'); return str(len(self.found))
# -- SharedByAll.found changed during episodes
class SharedPrompt(Find):
    seen = {}
    def prompt(self, task):
        self.seen[task.id] = self.seen.get(task.id, 0) + 1
        return [fe.Message(role='user', content=str(self.seen))]
# !! was shown differently the second time
class GoldMisspelt(Find):
    def gold_actions(self, task): return [fe.call_tool('fnd'), str(task.gold)]
# -- Error: there is no tool 'fnd'; did you mean 'find'?
class GoldWrong(Find):
    def gold_actions(self, task): return ['y']
# !! task 'train-0' scores 0 of 1
class NotDescribed(Find):
    @fe.tool
    def look(self): return 'x'
# -- tools without a description: look: a docstring tells the model
class AlwaysPaid(Find): rubric = fe.Rubric(lambda: 1.0)
# !! gives full marks for ''
class DataArray(Find):
    def task(self, split, index):
        return super().task(split, index).model_copy(update={'data': {'cells': numpy.arange(3)}})
# !! can't be written as JSON: Unable to serialize unknown type: <class 'numpy.ndarray'>
class PaidTwice(Find): rubric = fe.Rubric(lambda answer: 2.0 * (answer[:1] == 'x'))
# !! scored 2 of 1: raise max_reward in the class, or lower the reward
class ScoredByChance(Find): rubric = fe.Rubric(lambda: random.random() / 2)
# !! was scored 0.
